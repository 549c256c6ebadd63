"""What every job that leaves a run directory shares: options, directory, checkpoints, displays, report, result.

Nothing here knows a job. What differs between jobs, such as the columns of a table or the curves of a report, is data
that the job hands in (view.py).
"""
