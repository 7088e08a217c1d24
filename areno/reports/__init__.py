"""What a run did, read from its directory while it runs or afterwards.

- :mod:`run_data`: the files of a run as data; :mod:`run_samples`: chooses among its samples.
- :mod:`report`: the page ``report.html``, from :mod:`report_sections`, :mod:`sample_views`, :mod:`run_facts`
  (data, memory, checkpoints), :mod:`settings` (chosen ones and defaults) and ``templates/``.
- :mod:`verdict`: did it learn (:mod:`learning`), why did it end (:mod:`ending`), what is wrong and what to change
  (:mod:`problems`, :mod:`reward_problems`, :mod:`overfitting`, :mod:`hacking`), from :mod:`evidence`; :mod:`trends`: changes
  beyond noise; :mod:`advice`: names and values of options; :mod:`checkpoints`: what was saved.
- :mod:`explanation`: what a metric is, and what is normal.
- :mod:`compare`, :mod:`divergence`, :mod:`comparison_text`: what differs between two runs, and the first step that does.
- :mod:`plot`, :mod:`svg`: curves of several runs; :mod:`export`: their metrics and samples as tables.
"""
