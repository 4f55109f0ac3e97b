"""One generation request, whatever the protocol: parameters, job, usage, resume, stream."""
