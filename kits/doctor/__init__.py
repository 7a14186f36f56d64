"""`partway doctor`: finds the obstacles to a job, and which hosts reach each other."""
