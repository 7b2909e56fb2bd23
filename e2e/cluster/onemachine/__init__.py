"""A real Kubernetes on one machine: three nodes, a registry and images, from Debian's packages and one Go build."""
