package cli

import (
	"context"
	"log/slog"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
)

// prepareServers creates dev's tokens and, on servers of its own, the first stream. It reports
// whether NATS answers.
func prepareServers(ctx context.Context, cfg devConfig, in instance, log *slog.Logger) (connected bool, err error) {
	truth, err := postgres.Open(ctx, in.DatabaseURL, cfg.Postgres, postgres.RoleSystem, "dev")
	if err != nil {
		return false, err
	}
	defer truth.Close()
	nc, js, err := broker.Open(cfg.Broker, "dev", log)
	if err != nil {
		return false, err
	}
	defer nc.Close()
	if err := tokens.Ensure(ctx, truth, devTenant, devName, in.Token, tokens.Roles()); err != nil {
		return false, err
	}
	if cfg.Console.On {
		roles := []string{tokens.RoleRead, tokens.RoleModerate, tokens.RoleAdmin}
		if err := tokens.Ensure(ctx, truth, tokens.SystemTenant, devName, in.ConsoleToken, roles); err != nil {
			return false, err
		}
	}
	if cfg.DatabaseURL != "" {
		return nc.IsConnected(), nil
	}
	first, err := outbox.ReadPartition(ctx, truth, 0)
	if err != nil || first.Stream != "" || cfg.NATSURL != "" {
		return nc.IsConnected(), err // the relay checks that a stream is still the one that the database knows
	}
	// Consumers start together with the relay, and need the stream.
	_, err = broker.Declare(ctx, js, cfg.Broker, broker.Partition{FirstSlot: first.FirstSlot, LastSlot: first.LastSlot}, log)
	return nc.IsConnected(), err
}
