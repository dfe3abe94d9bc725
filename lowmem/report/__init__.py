"""Pages to look at: `report.html` of a run, and runs over each other. One file each, nothing fetched from anywhere."""
