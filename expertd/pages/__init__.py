"""Linux: reading, dropping and locking the pages of model files, and how much memory there is for them.

Each module has its part in docs/pagecache.md. Decisions about experts lie in `cache`; nothing here knows llama.cpp.
"""
