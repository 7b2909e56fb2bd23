"""What the quickstart and the scenarios share: the cluster they run on, kubectl and helm, a router to ask."""
