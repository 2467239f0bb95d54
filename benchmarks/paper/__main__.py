from benchmarks.paper.cli import main

main()
