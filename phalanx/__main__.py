"""``python -m phalanx`` is the same as ``phalanx``."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["agent"] and "--no-standby" in sys.argv:
        # Before the command line is loaded: see there.
        from phalanx.control.agent.cold_start import waited_for_work

        sys.argv[2:] = waited_for_work(sys.argv[2:])
    from phalanx.cli import main

    main()
