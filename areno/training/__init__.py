"""The training loop of all runs; the steps themselves are in ``areno/api/trainers`` and ``areno/experiments/trainers``.

- ``loop``: steps, evaluation, saving and resume; ``state``: what a run has done so far.
- ``objectives``: from rows to optimizer steps, for both front ends.
- ``checkpoints``: what a run resumes from; ``plain_objects``: reads and writes tensors and plain objects.
- ``saving``: models in Hugging Face format; ``frequency``: when to save, evaluate and write checkpoints.
- ``report``: what a step reports; ``stopping``: Ctrl-C and other signals.
- ``saved_rows``: training rows as arrays; ``replay``: the recorded rows of a step, and the checkpoint before it.
"""
