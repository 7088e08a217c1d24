"""Reports on runs in progress and on finished runs, from their run directories.

- :mod:`run_data`: the files of a run as data; :mod:`run_samples`: selects samples of a run.
- :mod:`report`: the page ``report.html``, from :mod:`report_sections`, :mod:`sample_views`, :mod:`run_facts`
  (data, memory and checkpoints), :mod:`settings` (changed settings and defaults) and ``templates/``.
- :mod:`verdict`: whether the run learned (:mod:`learning`), why it ended (:mod:`ending`), what is wrong and what to change
  (:mod:`problems`, :mod:`reward_problems`, :mod:`overfitting`, :mod:`hacking`), based on :mod:`evidence`.
- :mod:`trends`: changes beyond noise; :mod:`advice`: names and values of options; :mod:`checkpoints`: saved models.
- :mod:`explanation`: the meaning of a metric and its normal values.
- :mod:`compare`, :mod:`divergence`, :mod:`comparison_text`: the differences between two runs, and the first step that differs.
- :mod:`plot`, :mod:`svg`: curves of several runs; :mod:`export`: metrics and samples of several runs as tables.
"""
