from benchmarks.adams_or_adamw.cli import main

main()
