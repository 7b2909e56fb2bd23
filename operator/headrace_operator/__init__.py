"""The Kubernetes operator: DisaggDeployment resources in, groups of engine pods out."""
