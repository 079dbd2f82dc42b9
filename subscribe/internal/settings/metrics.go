package settings

// Registry makes the metrics of handlers. That of package prom is also the prometheus.Registerer of
// projections. This package names no type of Prometheus, so a program without metrics does not link
// its library.
type Registry interface {
	Handler(subscriber string) (*Metrics, error)
}

// Metrics are the metrics of one handler.
type Metrics struct {
	Handled, Failures, Foreign, Dead, Snapshots interface{ Inc() }
	Lag                                         interface{ Set(messages float64) }
}

// Unmeasured is the Registry of programs without metrics.
type Unmeasured struct{}

// Handler implements Registry.
func (u Unmeasured) Handler(string) (*Metrics, error) { return &Metrics{u, u, u, u, u, u}, nil }

// Inc does nothing.
func (Unmeasured) Inc() {}

// Set does nothing.
func (Unmeasured) Set(float64) {}
