"""The programs that ranks run. Each imports nothing of ours: the launcher starts it by its path, with JSON on stdin."""
