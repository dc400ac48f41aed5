"""The diagnosis: why the hit rate, TTFT and TPOT of a decision log are what they are."""
