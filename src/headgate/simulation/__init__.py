"""A deterministic simulation that runs the real code.

| file | owns |
| --- | --- |
| scheduler | tasks, virtual time, who runs next |
| world | the simulated clock and store, processes that stall and die, faults |
| actors | what the processes do: to a log alone |
| checker | what must hold at the end |
| scenes | short plays with a plot |
| tables | what the processes do to a shard with a MemTable: put, flush, read, collect |
| plots | who takes part in that, and where somebody stops |
| reads | the model that every read is compared with, and what must hold at the end |
| life | what the processes do beside them: load, compact, collect, pin, follow, over several shards |
| life_plots | who takes part in that |
| truth | the one order of entries and loads, and what must have been seen of it |
| run | one schedule from a seed, and many |
| shrink | from a failing schedule to a readable trace |
| exhaustive | every interleaving with few preemptions, on the real code |
| model · protocol · explore | the pure protocol, every interleaving, states hashed |

The store, the clock and the threads are swapped at their seams; everything between them is
what users run. Every choice comes from the seed, so a failing seed replays exactly.
"""
