"""llama.cpp through llama-cpp-python's low-level calls: load, tap, decode, sample, detokenise.

Nothing here decides what is cached; the tap reports routes to whoever asked for them. Importing this package does not
import llama_cpp: its modules do.
"""
