"""What the daemon tells: metrics, logs, the verdict on what is slow, and the word to systemd. What it counts is counted
on the floors below; the HTTP route of /metrics is the server's."""
