package broker_test

import (
	"slices"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/tidings/tidings/internal/broker"
)

// TestALoginAcknowledgesForItsOwnConsumerAlone: the subject of an acknowledgment names stream and
// consumer, and then has numbers, which NATS does not check. With `+NXT` it is also a request for
// the next message. So a subject that names another consumer and has the login's own one in a later
// part must not match.
func TestALoginAcknowledgesForItsOwnConsumerAlone(t *testing.T) {
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live"}
	for _, p := range []broker.Principal{
		{Role: broker.Subscriber, Name: "mailer", Tenant: 7, Durable: true, Filter: "follow.created"},
		{Role: broker.Subscriber, Name: "mailer", Durable: true, Filter: "follow.created"},
	} {
		own, allowed := p.DurableName(), func(subject string) bool {
			publish, _ := p.Permissions(cfg)
			return slices.ContainsFunc(publish, func(pattern string) bool { return server.SubjectsCollide(pattern, subject) })
		}
		for _, subject := range []string{
			"$JS.ACK.EVENTS-0." + own + ".1.2.3.4.5",
			"$JS.ACK.EVENTS-dead." + own + ".1.2.3.4.5",
			"$JS.ACK._.hash.EVENTS-0." + own + ".1.2.3.4.5",
			"$JS.ACK._.hash.EVENTS-0." + own + ".1.2.3.4.5.random",
		} {
			if !allowed(subject) {
				t.Errorf("%s may not send %s", p.Login(), subject)
			}
		}
		for at := range 5 { // each number
			numbers := []string{"1", "2", "3", "4", "5"}
			numbers[at] = own
			for _, prefix := range []string{"$JS.ACK.EVENTS-0.t8_mailer", "$JS.ACK._.hash.EVENTS-0.t8_mailer"} {
				subject := prefix
				for _, n := range numbers {
					subject += "." + n
				}
				if allowed(subject) {
					t.Errorf("%s may send %s", p.Login(), subject)
				}
			}
		}
	}
}
