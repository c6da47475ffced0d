"""The one family of errors. Each message says what was given, what was expected, and what to do.

ARCError
├── ConfigurationError   a setting or recipe value is wrong           (also a ValueError)
├── CompatibilityError   two things given do not fit each other       (also a ValueError)
├── DataError            a data set is missing, damaged or unreadable
└── RecordError          a run, checkpoint or result file is unusable
"""


class ARCError(Exception):
    """Whatever this package raises on purpose."""


class ConfigurationError(ARCError, ValueError):
    """A setting or recipe value is outside what it may be."""


class CompatibilityError(ARCError, ValueError):
    """Two things that were given do not fit each other."""


class DataError(ARCError):
    """A data set is missing, damaged or unreadable."""


class RecordError(ARCError):
    """A run, checkpoint or result file is unusable."""


class ARCWarning(UserWarning):
    """Something was handled, but the user should know."""
