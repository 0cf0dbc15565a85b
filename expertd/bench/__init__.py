"""Benchmarks: steered against plain (`ab`), on models of a geometry alone (`synth`), and of servers (`http`).

Measuring (`arm`, `child`), deciding what was measured (`results`) and showing it (`report`) are apart. Importing this
package imports nothing of it.
"""
