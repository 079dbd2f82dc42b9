/** Options of a connection to the URL of a NATS server. The client does not understand a URL with a password. */
export function natsOptions(text) {
  const url = new URL(text);
  return {
    servers: url.host, user: decodeURIComponent(url.username), pass: decodeURIComponent(url.password),
    maxReconnectAttempts: -1, reconnectTimeWait: 200, ignoreAuthErrorAbort: true, waitOnFirstConnect: true,
  };
}
