package replay

import (
	"context"
	"errors"
	"fmt"

	"github.com/tidings/tidings/projections"
)

// Exclusion prevents replays of projections. It has dropped the schemas of their interrupted
// replays, which are copies of data.
type Exclusion struct{ held []*replay }

// Exclude prevents replays of these projections until the exclusion is closed. Of deps it uses only
// URL and Postgres. It returns ErrRunning if a replay of one of them is running.
func Exclude(ctx context.Context, deps Deps, all ...projections.Projection) (_ *Exclusion, err error) {
	e := &Exclusion{}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close(ctx))
		}
	}()
	for _, p := range all {
		r := &replay{deps: deps, p: p, name: p.Name()}
		if err := r.lock(ctx); err != nil {
			return nil, err
		}
		e.held = append(e.held, r)
		if err := r.drop(ctx); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// Check returns an error if the exclusion may have ended because its connections are lost.
func (e *Exclusion) Check(ctx context.Context) error {
	for _, r := range e.held {
		if err := r.conn.Ping(ctx); err != nil {
			return fmt.Errorf("keep the lock against replays of %s: %w", r.name, err)
		}
	}
	return nil
}

// Close ends the exclusion.
func (e *Exclusion) Close(ctx context.Context) error {
	var errs []error
	for _, r := range e.held {
		errs = append(errs, r.unlock(context.WithoutCancel(ctx)))
	}
	return errors.Join(errs...)
}
