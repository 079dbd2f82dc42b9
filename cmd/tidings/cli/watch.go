package cli

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/term"

	"github.com/tidings/tidings/internal/status"
)

// watchEvery is between two looks of `tidings status --watch`.
const watchEvery = time.Second

// watch calls show with a new look each second until ctx ends, and returns nil then. Each look connects anew, so that servers may come and go.
func (p Process) watch(ctx context.Context, data string, show func(status.State) error) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var before status.State
	var at time.Time
	for {
		st, err := p.look(ctx, data)
		now := time.Now()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case !at.IsZero():
			st.PerSecond = status.Moved(before, st, now.Sub(at))
		}
		before, at = st, now
		if err := p.clear(now); err != nil {
			return err
		}
		if err := show(st); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// clear begins a new page on a terminal.
func (p Process) clear(now time.Time) error {
	if f, ok := p.Stdout.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	_, err := fmt.Fprintf(p.Stdout, "\x1b[H\x1b[2J%s\n\n", now.Format(time.RFC3339))
	return err
}

// look is one look at everything, with the subscribers.
func (p Process) look(ctx context.Context, data string) (st status.State, err error) {
	y, err := p.someSystem(ctx, data, "status")
	if err != nil {
		return st, err
	}
	defer y.close()
	if st, err = status.Await(ctx, y.Sources, status.Patience, status.State.Seen); err != nil {
		return st, err
	}
	return st, status.ReadExternal(ctx, y.Sources, &st)
}
