package console

import (
	"context"

	"github.com/tidings/tidings/ops/doctor"
)

type doctorPage struct {
	Findings         []doctor.Finding
	Errors, Warnings int
}

func (c *Console) doctorData(ctx context.Context, _ *view) (any, error) {
	now, err := c.observer.state(ctx, true)
	if err != nil {
		return nil, err
	}
	if now.Probed.Err != nil {
		return nil, now.Probed.Err
	}
	p := doctorPage{Findings: now.Findings}
	for _, f := range p.Findings {
		if f.Severity == doctor.Error {
			p.Errors++
		} else {
			p.Warnings++
		}
	}
	return p, nil
}
