"""The end of a sweep: its tables, its picture, and how to go on."""

from __future__ import annotations

from trainrun.folder.run_folder import write_text
from trainrun.output import path_to_paste, say
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import REPEATED, ranked_jobs
from trainrun.sweep.table import MEANS, jobs_csv, points_csv, print_tables, repeated_keys


def conclude(sweep: Sweep) -> None:
    """Print the tables, write them with the picture, and print where they are and how to go on."""
    jobs = ranked_jobs(list(sweep.jobs.values()))
    print_tables(sweep)
    write_text(sweep.folder / "sweep.csv", jobs_csv(sweep))
    say(f"table: {sweep.folder / 'sweep.csv'}")
    if repeated_keys(sweep):
        write_text(sweep.folder / MEANS, points_csv(sweep.points()))
        say(f"means: {sweep.folder / MEANS}")
    metrics = sorted({job.result.monitor for job in jobs if job.result.value is not None})
    if len(metrics) > 1:
        (sweep.folder / "sweep.png").unlink(missing_ok=True)
        say(f"picture: none, {' and '.join(metrics)} have no axis in common")
    elif metrics:
        from trainrun.sweep.picture import draw_sweep

        try:
            draw_sweep(sweep.folder / "sweep.png", jobs, sweep.swept_keys(), REPEATED)
            say(f"picture: {sweep.folder / 'sweep.png'}")
        except OSError as error:  # the table is what counts
            say(f"picture: {sweep.folder / 'sweep.png'} cannot be written ({error.strerror})")
    if any(sweep.jobs[num].result.state != "done" for num in sweep.wanted):
        say(f"what is not done: trainrun resume {path_to_paste(sweep.folder)}", flush=True)
