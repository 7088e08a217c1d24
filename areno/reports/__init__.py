"""Reports on runs in progress and on finished runs, from their run directories.

- :mod:`run_data` reads the files of a run. :mod:`run_samples` selects samples of a run.
- :mod:`report` writes the page ``report.html``. The parts of the page come from :mod:`report_sections`, :mod:`sample_views`,
  :mod:`run_facts` (data, memory and checkpoints), :mod:`settings` (changed settings and defaults) and ``templates/``.
- :mod:`verdict` judges, based on :mod:`evidence`, whether a run learned (:mod:`learning`), why it ended (:mod:`ending`), and
  which problems it has, with remedies (:mod:`problems`, :mod:`reward_problems`, :mod:`overfitting`, :mod:`hacking`).
- :mod:`trends` detects changes beyond noise. :mod:`advice` formats recommended options. :mod:`checkpoints` finds saved models.
- :mod:`explanation` explains a metric and its normal values.
- :mod:`compare`, :mod:`divergence` and :mod:`comparison_text` show how two runs differ, and in which step they first differ.
- :mod:`plot` and :mod:`svg` draw curves of several runs. :mod:`export` writes metrics and samples of several runs as tables.
"""
