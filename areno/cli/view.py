"""``areno view``: shows run directories on a local web page."""

import os
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from areno.config.packages import require_packages
from areno.config.parser import TypedParser
from areno.config.serve_options import API_KEY_VARIABLE


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno view",
        description="Show runs in the browser, even while they train: curves, samples token by token, conversations with "
        "tools, configurations side by side, and logs. The viewer changes no files. Unless you set --host, only "
        "this machine can open the page.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="runs", help="Folder with runs. Default: runs.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Address to listen on; addresses other than loopback need --api-key."
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="Port; 0 picks a free port. Default: 6333, or a free port if 6333 is in use.",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        help=f"Key that users must enter. Default: the environment variable {API_KEY_VARIABLE}, or none.",
    )
    parser.add_argument("--open", action="store_true", help="Open the page in the browser.")
    arguments = parser.parse_args(argv)
    require_packages("serve", "areno view needs")
    from areno.viewer.server import ViewerServer

    server = ViewerServer(Path(arguments.folder).expanduser(), arguments.host, arguments.port, arguments.api_key)
    for notice in server.notices:
        print(f"areno view: {notice}")
    print(f"areno view: {server.folder} at {server.url} (stop with Ctrl-C)")
    # In a thread, because a text browser blocks until it is closed; the server already accepts connections.
    if arguments.open:
        threading.Thread(target=webbrowser.open, args=[server.url], daemon=True).start()
    server.serve()
    return 0
