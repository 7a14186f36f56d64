"""`partway doctor`: what stands in the way of a job, and what each host reaches."""
