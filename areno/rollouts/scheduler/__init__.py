"""Worker processes by role and replica: started, watched, started again."""
