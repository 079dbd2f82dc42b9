package cli

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/term"

	"github.com/tidings/tidings/ops/status"
)

// watchEvery is the interval of `tidings status --watch`.
const watchEvery = time.Second

// watch prints the current state each second until ctx ends, and then returns nil. It connects
// again each time, so that servers may stop and start meanwhile.
func (s *session) watch(ctx context.Context) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var before status.State
	var at time.Time
	for {
		st, err := s.sample(ctx, s.data)
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
		if err := s.clear(now); err != nil {
			return err
		}
		if err := s.print(stateReport(st)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// clear clears the screen if stdout is a terminal.
func (p Process) clear(now time.Time) error {
	if f, ok := p.Stdout.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	_, err := fmt.Fprintf(p.Stdout, "\x1b[H\x1b[2J%s\n\n", now.Format(time.RFC3339))
	return err
}

// sample reads the state of all servers, including the external consumers.
func (p Process) sample(ctx context.Context, data string) (st status.State, err error) {
	y, err := p.open(ctx, data, "status", needAll|tolerant|orOutbox)
	if err != nil {
		return st, err
	}
	defer y.close()
	if st, err = status.Await(ctx, y.Sources, status.Patience, status.State.Seen); err != nil {
		return st, err
	}
	return st, status.ReadExternal(ctx, y.Sources, &st)
}
