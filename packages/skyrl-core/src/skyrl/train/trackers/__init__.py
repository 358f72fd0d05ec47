"""Where a run's metrics go: one file per sink, and the table that names them."""

from skyrl.train.trackers.tracker import TRACKERS, Tracker, TrackerSet, open_trackers

__all__ = ["TRACKERS", "Tracker", "TrackerSet", "open_trackers"]
