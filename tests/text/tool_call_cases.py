"""Hand-written renderers of every tool-call format, and calls to render."""

import json

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "detail": {"type": "boolean"},
                    "where": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

ROME = ("get_weather", {"city": "Rome", "days": 3})
OSLO = ("get_weather", {"city": "Oslo", "detail": True})
NOW = ("now", {})


def _json(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)


def _tags(name, arguments, tag, function, parameter, close, close_parameter):
    inner = "".join(
        f"{parameter}{key}{tag}{value if isinstance(value, str) else json.dumps(value)}{close_parameter}"
        for key, value in arguments.items()
    )
    return f"{function}{name}{tag}{inner}{close}"


def qwen3_coder(*calls):
    made = [
        _tags(*call, ">\n", "<tool_call>\n<function=", "<parameter=", "</function>\n</tool_call>", "\n</parameter>\n")
        for call in calls
    ]
    return "\n".join(made)


def minicpm(*calls):
    return "".join(_tags(*call, '">', '<function name="', '<param name="', "</function>", "</param>") for call in calls)


def minimax(*calls):
    body = ""
    for name, arguments in calls:
        body += f'<invoke name="{name}">\n'
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            body += f'<parameter name="{key}">{text}</parameter>\n'
        body += "</invoke>\n"
    return f"<minimax:tool_call>\n{body}</minimax:tool_call>"


def deepseek_v32(*calls):
    body = ""
    for name, arguments in calls:
        body += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            is_text = json.dumps(isinstance(value, str))
            body += f'<｜DSML｜parameter name="{key}" string="{is_text}">{text}</｜DSML｜parameter>\n'
        body += "</｜DSML｜invoke>\n"
    return f"<｜DSML｜function_calls>\n{body}</｜DSML｜function_calls>"


def glm(*calls):
    made = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        made.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(made)


def bare_json(*calls):
    return "\n".join(_json(*call) for call in calls)


def llama3(*calls):
    return "<|python_tag|>" + "; ".join(_json(*call, "parameters") for call in calls)


def mistral(*calls):
    return "[TOOL_CALLS][" + ", ".join(_json(*call) for call in calls) + "]"


def mistral_args(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _gemma_value(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(one, quote) for one in value) + "]"
    return json.dumps(value)


def gemma4(*calls):
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{_gemma_value(args, quote)}<tool_call|>" for name, args in calls)


def functiongemma(*calls):
    return "".join(
        f"<start_function_call>call:{name}{_gemma_value(args, '<escape>')}<end_function_call>" for name, args in calls
    )


def deepseek(*calls):
    made = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(made) + "<｜tool▁calls▁end｜>"


def deepseek_v31(*calls):
    made = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>" for name, args in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(made) + "<｜tool▁calls▁end｜>"


def kimi(*calls):
    made = [
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{json.dumps(args)}<|tool_call_end|>"
        for place, (name, args) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(made) + "<|tool_calls_section_end|>"


def pythonic(*calls):
    made = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    return f"[{', '.join(made)}]"


def harmony(*calls):
    return "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}<|call|>"
        for name, args in calls
    )


WRITERS = {
    "hermes": hermes,
    "qwen": hermes,
    "qwen3_coder": qwen3_coder,
    "minicpm": minicpm,
    "minimax": minimax,
    "deepseek_v32": deepseek_v32,
    "glm": glm,
    "json": bare_json,
    "llama3": llama3,
    "mistral": mistral,
    "mistral_args": mistral_args,
    "gemma4": gemma4,
    "functiongemma": functiongemma,
    "deepseek": deepseek,
    "deepseek_v31": deepseek_v31,
    "kimi": kimi,
    "pythonic": pythonic,
    "harmony": harmony,
}
