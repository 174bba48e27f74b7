"""What pytest leaves alone here: the site's settings, and programs that are run as such."""

collect_ignore_glob = ["conf.py", "_build/*", "figures/*", "tutorial/*"]
