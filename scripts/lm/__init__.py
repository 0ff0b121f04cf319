"""What ``train_lm.py`` and ``bench_overhead.py`` share: model, data, training, reports."""
