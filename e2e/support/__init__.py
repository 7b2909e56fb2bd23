"""What the quickstart and the end-to-end scenarios share: the cluster they run on, kubectl and helm, a router to ask."""
