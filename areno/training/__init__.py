"""The training loop of all runs. The code of a step is in ``areno/api/trainers`` and ``areno/experiments/trainers``.

- ``loop``: steps, evaluation, saving and resume
- ``state``: the progress of a run
- ``objectives``: turn rows into optimizer steps, for ``areno train`` and ``areno run``
- ``checkpoints``: writes and finds the checkpoints of a run
- ``plain_objects``: reads and writes tensors and plain objects
- ``saving``: saves models in Hugging Face format
- ``frequency``: decides when to save models, evaluate and write checkpoints
- ``reporter``: reports steps and evaluations
- ``stopping``: handles Ctrl-C and other signals
- ``saved_rows``: converts training rows to arrays and back
- ``replay``: the recorded rows of a step, and the checkpoint before the step
"""
