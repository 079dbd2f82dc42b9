package cli

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// part is a function that runs until its context ends.
type part struct {
	name string
	run  func(ctx context.Context) error
}

// runStages runs all parts at once until ctx ends or a part returns, which is an error. Then it
// stops them stage by stage: the parts of the next stage keep running until all parts of the stage
// before have returned.
func runStages(ctx context.Context, stages ...[]part) error {
	type running struct {
		cancel context.CancelFunc
		wg     sync.WaitGroup
	}
	var (
		started = make([]running, len(stages))
		ended   = make(chan struct{}) // closed when a part has returned
		once    sync.Once
		mu      sync.Mutex
		errs    []error
	)
	for i, stage := range stages {
		sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		started[i].cancel = cancel
		for _, p := range stage {
			started[i].wg.Go(func() {
				err := p.run(sctx)
				if err == nil && sctx.Err() == nil {
					err = errors.New("ended by itself")
				}
				if err != nil {
					mu.Lock()
					errs = append(errs, fmt.Errorf("%s: %w", p.name, err))
					mu.Unlock()
				}
				once.Do(func() { close(ended) })
			})
		}
	}
	select {
	case <-ctx.Done():
	case <-ended:
	}
	for i := range started {
		started[i].cancel()
		started[i].wg.Wait()
	}
	return errors.Join(errs...)
}
