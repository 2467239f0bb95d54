from benchmarks.which_decay.cli import main

main()
