/** What is in a gRPC error beyond its code and its message: the details that Quire sends with every refusal. */

import type { ServiceError } from "@grpc/grpc-js";

import { BadRequest, ErrorInfo, RetryInfo } from "./generated/google/rpc/error_details.js";
import { Status } from "./generated/google/rpc/status.js";

export interface Details {
  /** Wrong fields by their path in the message, each with what is wrong. */
  fields: Map<string, string>;
  /** When the same call may succeed, milliseconds; undefined where it will not by itself. */
  retryAfterMs: number | undefined;
  /** A stable name of the case, for programs; "" where there is none. */
  reason: string;
}

const TYPE = "type.googleapis.com/google.rpc.";

/** Reads the details of an error; all empty where it has none, as when there was no server. */
export function detailsOf(error: ServiceError): Details {
  const details: Details = { fields: new Map(), retryAfterMs: undefined, reason: "" };
  for (const raw of error.metadata?.get("grpc-status-details-bin") ?? []) {
    for (const { typeUrl, value } of Status.decode(raw as Buffer).details) {
      switch (typeUrl) {
        case `${TYPE}BadRequest`:
          for (const violation of BadRequest.decode(value).fieldViolations) {
            details.fields.set(violation.field, violation.description);
          }
          break;
        case `${TYPE}RetryInfo`: {
          const delay = RetryInfo.decode(value).retryDelay;
          details.retryAfterMs = Number(delay?.seconds ?? 0) * 1000 + (delay?.nanos ?? 0) / 1e6;
          break;
        }
        case `${TYPE}ErrorInfo`:
          details.reason = ErrorInfo.decode(value).reason;
          break;
      }
    }
  }
  return details;
}
