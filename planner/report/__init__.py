"""The picture of an iteration as one HTML file: the data, made here, and the page in ``web/``."""
