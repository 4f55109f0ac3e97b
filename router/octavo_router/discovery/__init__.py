"""Where endpoints come from: lists, files, DNS, Kubernetes. Each source reports its whole set."""
