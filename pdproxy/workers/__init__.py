"""``listen.workers`` above 1: processes behind one port that share nothing, and the process that supervises them."""
