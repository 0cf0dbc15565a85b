"""expertd: runs Mixture-of-Experts models larger than RAM by steering the page cache expert by expert."""

__version__ = "0.1.0"
