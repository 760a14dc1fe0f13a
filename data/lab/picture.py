"""matplotlib, set up so that the same figures give the same SVG file."""


def load_pyplot():
    """matplotlib.pyplot; ValueError where it is not installed, for a run of an experiment to say so
    at its start and not at its end."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("this draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pathoracle"
    from matplotlib import pyplot
    return pyplot
