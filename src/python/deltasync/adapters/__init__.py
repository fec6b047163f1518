"""Ready-made pieces for frameworks that already have a place for a weight transport: trl, verl.

Each module imports its framework itself, and nothing else does: ``deltasync.adapters.trl`` needs no trl (it speaks its
protocol), ``deltasync.adapters.verl`` needs verl.
"""
