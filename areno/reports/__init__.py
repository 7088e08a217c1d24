"""What a run did, read from its directory while it runs or afterwards.

- :mod:`run_data`: the files of a run as data; :mod:`run_samples`: chooses among its samples.
- :mod:`verdict`: did it learn (:mod:`learning`), why did it end (:mod:`ending`), what is wrong and what to change
  (:mod:`problems`, :mod:`hacking`); :mod:`trends`: changes beyond noise; :mod:`advice`: names and values of options.
- :mod:`report`: the page ``report.html``, from :mod:`report_sections`, :mod:`sample_views` and ``templates/``.
- :mod:`svg`: charts.
"""
