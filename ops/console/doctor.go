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
	now, err := c.look.state(ctx)
	if err != nil {
		return nil, err
	}
	var p doctorPage
	if p.Findings, err = doctor.Diagnose(ctx, c.look.src, now.State); err != nil {
		return nil, err
	}
	for _, f := range p.Findings {
		if f.Severity == doctor.Error {
			p.Errors++
		} else {
			p.Warnings++
		}
	}
	return p, nil
}
