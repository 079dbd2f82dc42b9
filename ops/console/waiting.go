package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/outbox"
)

// The acts on messages that were not published. Those on dead letters also take consumers' letters.
const (
	actRetryDead    = "dead_letter.retry"
	actDiscardDead  = "dead_letter.discard"
	actRetryWaiting = "message.retry"
	actKill         = "message.kill"
)

const (
	retryRows     = 1000 // messages that the page reads
	retryPerCause = 10   // of these, that it shows for each cause
)

type retryingPage struct {
	Causes []*retryCause // the one whose next attempt is first leads
	More   bool          // there may be more messages
	Most   int           // attempts of a message before the DLQ
}

// retryCause is why messages of one type failed. Its first message is retried next.
type retryCause struct {
	Cause, Type string
	N           int
	Messages    []outbox.WaitingMessage
}

// retryingData lists the messages of the outbox that failed and will be retried, by cause.
func (c *Console) retryingData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	all, err := outbox.Retrying(ctx, c.deps.Truth, tenant, retryRows)
	p := retryingPage{More: len(all) == retryRows, Most: outbox.MaxAttempts + 1}
	for _, m := range all {
		cause, eventType := deadletter.Cause(m.LastError), m.AggregateType+"."+m.Type
		i := slices.IndexFunc(p.Causes, func(r *retryCause) bool { return r.Cause == cause && r.Type == eventType })
		if i < 0 {
			p.Causes, i = append(p.Causes, &retryCause{Cause: cause, Type: eventType}), len(p.Causes)
		}
		if r := p.Causes[i]; len(r.Messages) < retryPerCause {
			r.Messages = append(r.Messages, m)
		}
		p.Causes[i].N++
	}
	return p, err
}

// waitingOf returns the message that an act of the token is about.
func (c *Console) waitingOf(ctx context.Context, tenant int64, in url.Values) (m outbox.WaitingMessage, err error) {
	id, err := strconv.ParseInt(in.Get("id"), 10, 64)
	if err != nil {
		return m, &inputError{"id is not a number."}
	}
	m, err = outbox.GetWaiting(ctx, c.deps.Truth, id)
	if errors.Is(err, outbox.ErrNotWaiting) || err == nil && tenant != 0 && m.TenantID != tenant {
		return m, &problem{http.StatusNotFound, "There is no such message that waits",
			"A relay has published it, or it is in the DLQ. Its page shows where it is."}
	}
	return m, err
}

func effectOfRetry(m outbox.WaitingMessage) []string {
	return []string{fmt.Sprintf("A relay tries the message within seconds, not in %s. The messages that wait behind it follow.",
		age(max(m.DueIn, 0)))}
}

func effectOfKill(outbox.WaitingMessage) []string {
	return []string{"Moves the message to the DLQ, and frees the messages that wait behind it. They overtake it.",
		"Retry or discard it there."}
}

// prepareWaiting describes the effect of an act on a message that waits.
func (c *Console) prepareWaiting(effect func(outbox.WaitingMessage) []string) func(context.Context, *view, url.Values) (subject, error) {
	return func(ctx context.Context, v *view, in url.Values) (subject, error) {
		m, err := c.waitingOf(ctx, v.who.TenantID, in)
		if err != nil {
			return subject{}, err
		}
		s := subject{Target: fmt.Sprintf("message %d, %s.%s of %s/%s", m.OutboxID, m.AggregateType, m.Type, m.AggregateType,
			m.AggregateID), Tenant: m.TenantID, Back: address("event", "q", m.OutboxID, "tenant", m.TenantID), Says: effect(m)}
		if m.LastError != "" {
			s.Says = append(s.Says, fmt.Sprintf("It failed %d of %d times. The last error: %s", m.Attempts, outbox.MaxAttempts+1,
				m.LastError))
		}
		return s, nil
	}
}

// doWaiting retries a message or moves it to the DLQ.
func (c *Console) doWaiting(do func(ctx context.Context, pool *pgxpool.Pool, id int64, actor, reason string) error,
	says string) func(context.Context, *doing) (string, error) {
	return func(ctx context.Context, d *doing) (string, error) {
		m, err := c.waitingOf(ctx, d.Who.TenantID, d.In)
		if err != nil {
			return "", err
		}
		err = do(ctx, c.deps.Truth, m.OutboxID, d.actor(), d.Act.Reason)
		switch {
		case errors.Is(err, outbox.ErrNotWaiting):
			return "", failure(fmt.Sprintf("Message %d no longer waits. Nothing was done.", m.OutboxID))
		case errors.Is(err, outbox.ErrDue):
			return "", failure(fmt.Sprintf("Message %d is due, and a relay may be publishing it. Nothing was done.", m.OutboxID))
		case errors.Is(err, outbox.ErrBehind):
			return "", failure(fmt.Sprintf("Message %d waits behind message %d. Retry or kill that one, and this one follows.",
				m.OutboxID, m.Behind))
		case err != nil:
			return "", err
		}
		if c.deps.Wake != nil {
			c.deps.Wake(m.Slot)
		}
		return fmt.Sprintf(says, m.OutboxID), nil
	}
}

// soon formats when a message is due.
func soon(d time.Duration) string {
	if d <= 0 {
		return "now"
	}
	return "in " + age(d)
}
