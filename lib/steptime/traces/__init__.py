"""What other tools recorded: profilers' traces, layer-profile graphs, tables of collectives; and timelines to look at.

Readers hold a part of a file at a time, unpickle nothing, and say in one line what is wrong with a file and where.
"""
