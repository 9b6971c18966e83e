"""Many workers, really run: processes, shaped links, synchronisation schedules, collectives."""
