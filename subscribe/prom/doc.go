// Package prom exports the metrics of subscribers to Prometheus. It is for programs downstream that
// pass Metrics to subscribe.Handle or projector.Project. It is supported: CHANGELOG.md names every
// change that a program of yours would notice.
//
// It is a package of its own, so that a program without metrics does not link Prometheus' library,
// which is larger than all of package subscribe.
package prom
