"""The training loop of all runs. The code of a step is in ``areno/api/trainers`` and ``areno/experiments/trainers``.

- ``loop``: steps, evaluation, saving and resume
- ``state``: the progress of a run
- ``objectives``: from rows to optimizer steps, for both front ends
- ``checkpoints``: writes and finds the checkpoints of a run
- ``plain_objects``: reads and writes tensors and plain objects
- ``saving``: models in Hugging Face format
- ``frequency``: when to save, evaluate and write checkpoints
- ``reporter``: reports steps and evaluations
- ``stopping``: handles Ctrl-C and other signals
- ``saved_rows``: training rows as arrays
- ``replay``: the recorded rows of a step, and the checkpoint before the step
"""
