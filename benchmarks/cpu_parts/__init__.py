"""Parts of `benchmarks/engines_cpu.py`: one program per engine, each run by the interpreter that has that engine."""
